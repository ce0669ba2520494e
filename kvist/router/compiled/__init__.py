"""What the router's decisions run as machine code; `kvist.machine_code` says where that lies."""
