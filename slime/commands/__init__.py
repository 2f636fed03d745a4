"""One module per `slime` subcommand; only slime.cli and the two loops import one.

Imports everything below. slime.cli imports the command that is asked for, the loops `launch`.
"""
