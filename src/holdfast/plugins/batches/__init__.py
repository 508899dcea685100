"""Batches: requests that a provider answers in bulk, hours later, while no process of ours may run.

The core knows only `targets/types.py`, which loads the rest by name when a run needs it.

`ledger`      the steps of each batch, on disk before the next step is taken, and the results
`providers`   the APIs of batches: OpenAI's, Together's, Anthropic's, and files for models without a server
`client`      the requests of one model, and those who wait for their answers
`hub`         what all clients of a run share: submits batches, asks about them, and hands out results
`collecting`  collects the batches of a run without working on it, and lists them
"""
