"""Names and shapes, both ways."""
