"""What `crash/ladder` and `crash/gpt2` train with: recipe, model, optimisers, log, loop, what is looked at.

`loop` is the place to begin. A case brings its data and a `Trainer` for it: `text_trainer` here, for a text
that fits on the device, or the one of `crash/gpt2`, for token files, micro-batches and many processes.
"""
