"""What each verb of the command line does, as the process that launches and as a rank.

torch is imported by ranks and by preflight only, after everything that check() can refuse.
"""
