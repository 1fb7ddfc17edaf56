"""Describes all APIs in one OpenAPI document. Imported when somebody asks for it."""
