"""One module per `slime` subcommand; slime.cli imports the one that is asked for.

Imports everything below; nothing imports a command.
"""
