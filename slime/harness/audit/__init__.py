"""Audits what any RL framework wrote about a run; trains nothing and runs nothing that it reads.

Readers turn files into `SampleTable`s, one step each; families of findings look at the tables one
after another, so that a run never has to fit into memory; reports show the result. No link out of
the folder is followed. Imports no Ray and no Megatron.
"""
