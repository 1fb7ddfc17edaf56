"""Reads what each family of checkpoints says: its configuration's fields, and the names of its tensors. No torch.

One file per ``model_type``. What a part computes is not here but in ``regions.vit``, ``regions.gpt2`` and
``regions.bert``, which several families share.
"""
