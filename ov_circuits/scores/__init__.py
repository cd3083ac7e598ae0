"""What the weights say about each head."""
