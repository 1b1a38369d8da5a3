"""What every floor uses: errors, units, documents of a bounded size, digests, policies of bad steps, torch's private
names."""
