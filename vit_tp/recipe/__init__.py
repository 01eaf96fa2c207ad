"""What changes learning step by step: parameter groups, the course of the learning rate, mixing."""
