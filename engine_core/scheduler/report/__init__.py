"""What the scheduler says of itself: why each request is where it is, and statistics."""
