"""Holds the demo captioner's checkpoint folder and samples; `training/` has made both.

There `grammar` says what a caption can be, `scenes` draws lots for a scene, `drawing` paints it, `build` makes the
untrained checkpoint folder, `train` trains it, `evaluate` measures it. The server reads only the checkpoint's
files (config.json, model.safetensors, tokenizer.json, …) and imports none of these modules.
"""
