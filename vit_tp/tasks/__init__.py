"""What is asked of the model: the loss, and the figures of an evaluation."""
