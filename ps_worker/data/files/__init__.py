"""Files by name: which there are, their content, who reads which split."""
