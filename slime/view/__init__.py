"""Pages over runs and recordings, and a report in one file; writes into no run, no Ray, no torch.

`catalog` finds what there is, `run_data`, `rollout_table` and `token_view` read it, `site` and the
`pages_*` modules make pages of it, `guard` decides who may see them. Nothing that a file holds is executed.
"""
