"""Which mutants are there? One file a room; a mutant is named by what is wrong with it."""
