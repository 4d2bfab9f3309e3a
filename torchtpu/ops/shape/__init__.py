"""Creation, indexing, sorting, joining and padding."""
