"""The trainer and the engines, one folder each; the package itself defines nothing."""
