// The run page.
