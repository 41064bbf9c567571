"""What others saved: readers of quantized checkpoints, one a format, that make this package's weights of them."""
