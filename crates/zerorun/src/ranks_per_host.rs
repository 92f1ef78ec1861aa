//! Parses the number of ranks on a host: a number, or one of torchrun's keywords.

/// The maximum number of ranks on a host.
const MAX_RANKS: u16 = 1024;
/// The folder in which NVIDIA's driver lists its devices.
const GPUS: &str = "/proc/driver/nvidia/gpus";
/// The variable that selects the devices visible to programs.
const DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// Parses `N`, `cpu` (the number of cores that this process may use), `gpu` (the number of GPUs), or `auto` (GPUs or,
/// if there are none, cores).
///
/// # Errors
/// Returns a message if the text is invalid, or if it is `gpu` and there is no GPU.
pub(super) fn ranks(text: &str) -> Result<u16, String> {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let number = match text {
        "cpu" => cores(),
        "gpu" => match gpus() {
            0 => return Err("there is no NVIDIA GPU on this host; give a number, or `cpu`".into()),
            gpus => gpus,
        },
        "auto" => match gpus() {
            0 => cores(),
            gpus => gpus,
        },
        text => text.parse().map_err(|_| format!("give a number from 1 to {MAX_RANKS}, or `auto`, `cpu` or `gpu`"))?,
    };
    match u16::try_from(number) {
        Ok(ranks) if (1..=MAX_RANKS).contains(&ranks) => Ok(ranks),
        _ => Err(format!("{number} is not in 1..={MAX_RANKS}")),
    }
}

/// Returns the number of GPUs that are visible to programs.
fn gpus() -> usize {
    let installed = std::fs::read_dir(GPUS).map_or(0, |entries| entries.flatten().count());
    match std::env::var(DEVICES) {
        Ok(devices) => count_visible(&devices).min(installed),
        Err(_) => installed,
    }
}

/// Counts the devices in a list, up to the first empty entry or negative number.
fn count_visible(devices: &str) -> usize {
    devices.split(',').map(str::trim).take_while(|device| !device.is_empty() && !device.starts_with('-')).count()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn torchruns_words_count_what_the_host_has() {
        let cores = std::thread::available_parallelism().unwrap().get();
        assert_eq!(usize::from(ranks("cpu").unwrap()), cores);
        assert_eq!(ranks("4"), Ok(4));
        match gpus() {
            0 => {
                assert_eq!(usize::from(ranks("auto").unwrap()), cores);
                insta::assert_snapshot!(ranks("gpu").unwrap_err(), @"there is no NVIDIA GPU on this host; give a number, or `cpu`");
            }
            gpus => assert_eq!([ranks("auto"), ranks("gpu")], [Ok(gpus as u16), Ok(gpus as u16)]),
        }
        for text in ["0", "1025", "-1", "two", "GPU", ""] {
            assert!(ranks(text).is_err(), "{text}");
        }
    }

    #[test]
    fn visible_devices_end_where_cuda_ends_them() {
        assert_eq!(["0,2", "GPU-8a, GPU-9b", "0,-1,2", "-1", ""].map(count_visible), [2, 2, 1, 0, 0]);
    }
}
