"""What only a GPU can show: `make gpu-check`, or `python -m benchmarks.gpu`."""
