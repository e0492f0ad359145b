"""A page in the browser that shows what every patch of an image attends to."""
