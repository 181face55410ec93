"""`stagemesh certs`: a private CA for one mesh, and certificates that carry a role."""
