"""Numbers about a run: contributions that merge exactly, and the values that losses, batches and
rollouts contribute.

Imports data and algorithms; where the numbers go is the business of slime.tracking.
"""
