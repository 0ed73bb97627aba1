"""What a request, a message or a job goes through: plans, and the shells that drive them."""
