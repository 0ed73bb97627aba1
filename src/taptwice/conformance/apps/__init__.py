"""The reference applications, one file a framework: small enough to be copied."""
