"""What records say, worked out before anything is shown."""
