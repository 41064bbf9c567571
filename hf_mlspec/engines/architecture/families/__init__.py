"""Which families of models are described? One file a form of norms, one entry a class."""
