"""Reads what each family of checkpoints says: its configuration's fields, and the names of its tensors.

There is one file for each ``model_type``, and one for each of the ``parts`` that families consist of.
``models.layers`` has the computations of a part. Imports no torch.

Each function that reads fields raises ``ConfigError`` where a field has a value that is not supported.
"""
