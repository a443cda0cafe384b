"""Graph passes of olq_fx, one a file; `pipeline` holds their order."""
