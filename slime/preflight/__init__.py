"""What is checked before a run starts: options, files, models, functions; starts nothing.

Imports everything that a run is made of; nothing that runs imports it.
"""
