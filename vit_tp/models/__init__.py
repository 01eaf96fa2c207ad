"""What is composed: a timm model, its stages, their costs and their first weights."""
