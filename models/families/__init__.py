"""Reads what each family of checkpoints says: its configuration's fields, and the names of its tensors. No torch.

One file per ``model_type``, and one for each of the ``parts`` that they are made of. What a part computes is not
here but in ``models.regions``.
"""
