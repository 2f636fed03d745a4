"""`slime audit`: reads what an RL framework wrote about a run and says what is wrong with the run.

Trains nothing, executes nothing that it reads, follows no link out of the folder. Readers turn
files into `SampleTable`s, one step each; families of findings look at the tables one after another,
so that a run never has to fit into memory; two reports show the result. Imports no Ray and no
Megatron.
"""
