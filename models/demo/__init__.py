"""Holds the demo captioner's checkpoint folder and samples, which the modules of `training/` make.

`scenes` draws random scenes and their captions, `drawing` paints a scene, and `train` makes, trains and measures
the model. The server reads only the checkpoint's files (config.json, model.safetensors, tokenizer.json, …) and
imports none of these modules.
"""
