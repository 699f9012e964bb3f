"""What any folder may use, and what knows nothing of tensors: text for people."""
