"""What a report says of pipeline, context and expert parallel steps."""
