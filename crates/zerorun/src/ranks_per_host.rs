//! The number of ranks on a host: a number, or one of torchrun's words.

/// The most ranks of a host.
const MOST: u16 = 1024;
/// Where NVIDIA's driver lists its devices.
const GPUS: &str = "/proc/driver/nvidia/gpus";
/// Which of them programs see.
const DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// Reads `N`, `cpu` (as many as cores that this process may use), `gpu` (as many as GPUs), or `auto` (GPUs or, without any, cores).
///
/// # Errors
/// What is wrong with the text, or that there is no GPU.
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
        text => text.parse().map_err(|_| format!("give a number from 1 to {MOST}, or `auto`, `cpu` or `gpu`"))?,
    };
    match u16::try_from(number) {
        Ok(ranks) if (1..=MOST).contains(&ranks) => Ok(ranks),
        _ => Err(format!("{number} is not in 1..={MOST}")),
    }
}

/// The number of GPUs that programs see.
fn gpus() -> usize {
    let there = std::fs::read_dir(GPUS).map_or(0, |entries| entries.flatten().count());
    match std::env::var(DEVICES) {
        Ok(devices) => visible(&devices).min(there),
        Err(_) => there,
    }
}

/// How many devices a list names: those behind a negative number do not count.
fn visible(devices: &str) -> usize {
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
        assert_eq!(["0,2", "GPU-8a, GPU-9b", "0,-1,2", "-1", ""].map(visible), [2, 2, 1, 0, 0]);
    }
}
