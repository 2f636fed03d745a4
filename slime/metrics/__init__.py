"""Contributions that merge exactly, and what losses and rollouts report; no Ray, no HTTP.

Imports data and algorithms; where the numbers go is the business of slime.tracking.
"""
