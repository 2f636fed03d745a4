"""A local web page over runs and recordings: `slime view`.

`catalog` finds what there is, `run_data`, `rollout_table` and `token_view` read it, `site` and the
`pages_*` modules make pages of it, `guard` decides who may see them. Pages only read: nothing that
a file holds is executed, and nothing is written.
"""
