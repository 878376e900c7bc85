"""Pages that open from a file: their templates, and how data gets into them without becoming part of them."""
