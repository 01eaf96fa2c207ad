"""How a module becomes one rank's slice, and how slices become the whole again."""
