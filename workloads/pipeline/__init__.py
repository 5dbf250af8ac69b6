"""Pipeline parallel steps: schedules as data, and what runs and explains them."""
