//! CRC-32C (Castagnoli), and its masked form used in TFRecord files.

/// The polynomial 0x1EDC6F41 with its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Returns the checksum of `bytes`.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)])
}

/// Returns the checksum as TFRecord stores it: rotated and offset, so that a checksum of data that contains checksums
/// stays reliable.
pub(super) fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_rfc_3720() {
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&rising), 0x46dd_794e);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
    }
}
