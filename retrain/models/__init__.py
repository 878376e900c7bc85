"""Network architectures, built from plain torch modules so that every attribution library recognises them."""
