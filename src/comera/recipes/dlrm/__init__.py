"""Click prediction."""
