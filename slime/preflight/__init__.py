"""What is checked before a run starts: options against files, models, data and users' functions.

Imports everything that a run is made of; nothing that runs imports it.
"""
