"""Describes all APIs in one OpenAPI document. Imported on the first request for the document."""
