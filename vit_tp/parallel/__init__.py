"""Who talks to whom: the grid of ranks, its groups, the exchanges and the random numbers."""
