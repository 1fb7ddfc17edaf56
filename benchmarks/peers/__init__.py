"""What snapcap is measured against."""
