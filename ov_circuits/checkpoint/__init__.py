"""Files: where a checkpoint lies, which tensors it holds, how its family lays them out. Knows nothing of heads."""
