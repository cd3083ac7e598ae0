"""What a prompt says: writes per head and per source token, and an account that closes."""
